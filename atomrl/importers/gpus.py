"""The GPUs of a script: the first line of a report says what becomes of them."""

from atomrl.importers.translation import Translation

ONE = "--gpus 1 --memory 24GiB plans it for one card"


def put_gpus(t: Translation, gpus: int, said: str, machines: int = 1) -> None:
    """Train on as many GPUs as the run is started on, where the script has several.

    Args:
        gpus: of all machines that train.
        said: what of the script says so.
        machines: that they are in.
    """
    t.gpus = (gpus, said)
    if gpus > 1:
        t.tree["backend"] = {"type": "fsdp"}
    t.machines = machines


def gpu_line(t: Translation, rows_per_update: int | None, draws: bool) -> str:
    """Return the first line of the report: what becomes of the script's GPUs."""
    if t.gpus is None:
        return "1 GPU: the script does not say on how many it runs; the config is for one process"
    count, said = t.gpus
    if count == 1:
        return f"1 GPU ({said}): the config is for one process"
    batch = f", {rows_per_update} rows an optimizer step" if rows_per_update else ""
    parts = [
        f"{count} GPUs ({said}): the config has backend.type=fsdp, which shards weights, gradients and Adam "
        "over as many "
        f"GPUs as the run is started on, and its batches are those of all {count} together{batch}: the same "
        "numbers on any"
    ]
    if draws:
        several = "on several with cluster.replicas (docs/guides/distributed_rollout.md)"
        parts.append(f"completions are drawn on the first GPU, {several}")
    if t.machines > 1:
        parts.append(f"on {t.machines} machines torchrun starts it on each (docs/guides/multi_gpu.md)")
    return "; ".join([*parts, ONE])
