"""Between Hugging Face folders and distributed checkpoints, in one process, layer by layer."""
