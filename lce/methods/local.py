"""`LocalMethod`: near tokens at their true distances, all others at distances of the method's own."""

from collections.abc import Mapping

from torch import Tensor

from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import MethodState
from lce.methods.base import Method, resolved
from lce.methods.turned_keys import recent_keys


class LocalMethod(Method):
    """A method whose queries see the last `local` tokens at true distances, and farther tokens at other distances.

    Keys are cached unrotated. The last `n_recent` keys are also stored at their absolute positions.
    """

    local: int | None  # each derived class declares this knob
    sinks = 0  # a knob of some derived classes

    @property
    def n_local(self) -> int:
        """The number of local tokens: the knob `local`, after `resolve`."""
        return resolved(self.local)

    @property
    def n_recent(self) -> int:
        """The number of earlier tokens whose keys are also stored at absolute positions, for parts with `exact`."""
        return self.n_local

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(sinks=self.sinks, local=self.n_recent)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return recent_keys(self, self.n_recent, layout)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return None
