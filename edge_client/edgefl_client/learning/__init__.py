"""Learning on the device: local epochs of a bundle's training graph on the owner's pictures.

    picture_rows      the pictures that a table or folder names, prepared
    own_pictures      which of them the owner named, and who is held back for the learning gate
    options, limits   what the owner may change; when learning has to stop, and what a step would take
    round_plan        the federation's settings in the bundle's step
    round_learner     the contract of a round, whatever the method; `learner_table` says which one meets it
    fedevprompt       its learner; `session` takes a step of its training graph
    fedclf            its learner; `contrast_session`, `views` and `feature_queue` serve it
    learning_gate     bundle against personal values on the pictures held back
    checkpoint        where learning stands, written so that a kill at any moment loses nothing but time
    round_alone       a round alone: what `edgefl train` does
    live_round        rounds of a federation: what `edgefl sync` learns
    round_report      what a round tells on its way

Orders, turns, the prior, balanced accuracy and all about maps are `edgefl_protocol.rules`, which the trainer calls too.
No framework: numpy, Pillow and onnxruntime. Source: docs/design.md, sections 7 and 9.
"""
