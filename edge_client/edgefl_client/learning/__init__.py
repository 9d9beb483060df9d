"""Learning on the device: local epochs of a bundle's training graph on the owner's pictures.

    rows        the pictures, prepared, and which of them are held back for the gate
    draws       orders and turns, the trainer's own draws
    peers       the others' rollout maps as the step takes them
    session     the training graph: one step; contrast_session: that of FedCLF
    views       random views of pictures; feature_queue: banks of features, first in first out
    checkpoint  where learning stands, written so that a kill at any moment loses nothing but time
    limits      minutes, memory, battery; step_memory: what a step would take
    gate        bundle against personal values on the pictures held back; verdict: what it found
    files       learned values in a file with a checksum
    personal    the values that passed
    options     what the owner may change; owned: which pictures are learned from, and who is held back
    rounds      the contract of a round, whatever the method; fedevprompt and fedclf: who meets it; learners: which one
    agreed      the federation's settings in the bundle's step
    running     rounds alone: what `edgefl train` does
    live        rounds of a federation: what `edgefl sync` learns

No framework: numpy, Pillow and onnxruntime. Source: docs/design.md, sections 7 and 9.
"""
