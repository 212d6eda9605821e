"""What can go wrong, a class for each cause. All derive from `WeftError`.

`rank` names the rank that an error is about, where one is known; `missing` holds, for a wait that
took too long, a tuple `(rank, expected, seen)` for each peer that it lacks.
"""


class WeftError(Exception):
    """Something that Weft could not do; the message says what to do about it."""

    rank: int | None = None
    missing: tuple[tuple[int, int, int], ...] | list[tuple[int, int, int]] = ()


class ConfigurationError(WeftError, ValueError):
    """An argument or an environment variable has no meaning, or contradicts another."""


class ConfigurationMismatchError(ConfigurationError):
    """The ranks gave different arguments to a call that all of them make."""


class AddressError(ConfigurationError):
    """It is not known, or cannot be resolved, where rank 0 listens."""


class SecretError(ConfigurationError):
    """The shared secret is missing, unreadable or not the others'."""


class WorldSizeError(ConfigurationError):
    """The ranks disagree on how many they are."""


class RankTakenError(ConfigurationError):
    """Two processes claim the same rank."""


class SizeError(WeftError, ValueError):
    """What was asked for cannot fit; the message says by how much."""


class ShapeError(WeftError, ValueError):
    """An array has the wrong shape, dtype or layout."""


class ExpertError(WeftError, ValueError):
    """A token names an expert that does not exist, or one twice."""


class ListenError(WeftError, OSError):
    """Rank 0 cannot listen where it should."""


class BootstrapError(WeftError):
    """Not all ranks came in time."""


class WireVersionError(WeftError):
    """The ranks run versions of Weft that cannot talk to each other."""


class NoRouteError(WeftError):
    """No provider that both ranks have reaches a peer."""


class ConnectError(WeftError, ConnectionError):
    """A peer cannot be connected to."""


class ProviderError(WeftError):
    """A provider cannot be used on this machine."""


class DeviceError(WeftError, RuntimeError):
    """A GPU, its driver or the compiler of its kernels refused something, here or at a peer.

    What a GPU says may be about work that was put on it earlier, also by others.
    """


class AllocationError(WeftError, MemoryError):
    """Memory could not be had."""


class RegionError(WeftError, ValueError):
    """Memory of this kind cannot be used in this way."""


class WrongGroupError(WeftError, ValueError):
    """A region or counter of another communicator, or of the group before `reform`."""


class OutOfRangeError(WeftError, IndexError):
    """A slice is not inside its region."""


class UnknownError(WeftError, LookupError):
    """A region, counter, rank or request that is not known."""


class NotSharedError(UnknownError):
    """A counter was used before `Communicator.share`."""


class LimitError(WeftError):
    """A limit that was set at construction."""


class CreditError(WeftError):
    """A round that its owner has not allowed yet, or that is over, or a credit for no arrivals."""


class StageError(WeftError):
    """A call came out of order."""


class AlreadySharedError(StageError):
    """A counter was shared a second time."""


class BufferInUseError(WeftError):
    """All sets of buffers are held by handles that were not released."""


class CapacityError(WeftError):
    """A rank would receive more tokens than it has room for; all ranks raise this alike."""


class WaitTimeoutError(WeftError, TimeoutError):
    """A wait took longer than it was given. What it waited for goes on: it may be repeated."""


class GroupPoisonedError(WeftError):
    """The group is dead: a rank asked for it, or something went wrong that cannot be mended.

    After any error of this family the group's memory is not used again; `Communicator.reform` makes
    a new group of the survivors.
    """


class PeerLostError(GroupPoisonedError, ConnectionError):
    """A rank's process is gone, or it gives no sign of life."""


class PeerLeftError(GroupPoisonedError):
    """A rank finished before the others were done with it."""


class WriteFailedError(GroupPoisonedError):
    """A write failed; nobody knows what it wrote."""


class ProtocolError(GroupPoisonedError):
    """A peer broke the protocol."""


class MalformedError(ProtocolError):
    """A peer sent something that cannot be understood."""


class ExcludedError(GroupPoisonedError):
    """The others formed a new group without this rank."""


class SupersededError(WeftError):
    """A newer group was formed in place of this one."""


class ClosedError(WeftError):
    """The communicator or the all-to-all was closed."""


class ForkError(WeftError):
    """The process was forked after `weft.init()`."""


class SimulationError(WeftError):
    """A simulated schedule deadlocks, or what it sends can never arrive."""


class SystemCallError(WeftError, OSError):
    """The operating system refused something."""
