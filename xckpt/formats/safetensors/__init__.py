"""safetensors files and the folders of a sharded model."""
