"""How speeds are measured: sides in turns, medians with intervals, CPU time, and the references to compare with."""
