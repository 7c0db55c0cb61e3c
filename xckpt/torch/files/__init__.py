"""The files that torch writes, read without torch: nothing in them is unpickled or imported."""
