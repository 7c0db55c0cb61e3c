"""Small chunks that lie together: packs, written and read (`xckpt.core.manifest.packs`)."""
