"""The files that torch writes, read and written without torch: nothing is unpickled or imported."""
