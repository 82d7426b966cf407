"""One module per area; each has `ADAPTERS: dict[str, Adapter]`, keyed by the file's stem ("advantage.grpo.verl").

An adapter takes a case's inputs and parameters and returns its outputs by the names of the file. It renames, reshapes
and calls atoms with parameters; a convention that only a peer has (an epsilon on a count, a bound on an estimate, the
reward of a prompt's only completion) is put together from atoms here, and is no option of theirs. Atoms are called as
attributes of their module (`advantages.group_zscore`), so that the test that breaks them one by one reaches them.
`harness` says what the inputs look like.
"""
