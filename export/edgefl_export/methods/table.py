"""The graph of every method that devices learn, by the method's name. CONTRIBUTING.md says how one is added."""

from edgefl_export.methods import fedclf, fedevprompt
from edgefl_export.methods.learned_method import LearnedMethod

GRAPHS: dict[str, LearnedMethod] = {"fedevprompt": fedevprompt.LEARNED, "fedclf": fedclf.LEARNED}
