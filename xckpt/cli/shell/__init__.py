"""What people expect of a command: completion in their shell, and a page of the manual."""
