"""Train with Megatron Core: tensor, pipeline and expert parallelism."""
