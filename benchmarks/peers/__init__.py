"""Ways to save and load the same flat state, all behind one interface: tierstore, its peers, and the limits of the machine.

A peer that does not install or run here is listed with the reason, never left out in silence.
"""
