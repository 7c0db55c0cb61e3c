"""Other libraries' checkpoints: each format as a source of tensors, and most as a sink too.

A source says what is in a checkpoint and reads any box of it; a sink lays an output out under a
temporary name, takes boxes in any order, and gives the output its name when all is there. Neither
imports the library whose format it is.
"""
