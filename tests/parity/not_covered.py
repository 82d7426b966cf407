"""Files of golden numbers that have no adapter, with the reason. A file with neither an adapter nor a line fails."""

NOT_COVERED: dict[str, str] = {
    "preference.prm_labels.trl": "it places labels of steps for a process reward model, which is not among the methods",
}
