"""Models: a readable GPT, loading and saving in Hugging Face layout, low-rank adapters."""
