"""Learning on the device: local epochs of a bundle's training graph on the owner's labelled pictures.

    rows        the pictures, prepared, and which of them are held back for the gate
    draws       orders and turns, the trainer's own draws
    peers       the others' rollout maps as the step takes them
    session     the training graph: one step
    checkpoint  where learning stands, written so that a kill at any moment loses nothing but time
    limits      minutes, memory, battery
    gate        bundle against personal values on the pictures held back; verdict: what it found
    files       learned values in a file with a checksum
    personal    the values that passed
    running     all of it: what `edgefl train` does

No framework: numpy, Pillow and onnxruntime. Source: docs/design.md, sections 7 and 9.
"""
