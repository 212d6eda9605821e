"""Errors: a class for each cause. All derive from `WeftError`.

`rank` names the rank that an error is about, where one is known; `missing` holds, for a wait that
took too long, a tuple `(rank, expected, seen)` for each peer that it lacks.
"""


class WeftError(Exception):
    """Base for all Weft errors; messages end with a remedy."""

    # No separate layout: `InternalError` becomes a base for an existing class.
    __slots__ = ()
    rank: int | None = None
    missing: tuple[tuple[int, int, int], ...] | list[tuple[int, int, int]] = ()


class InternalError(WeftError):
    """A Weft defect: a panic in the native module. The group's state is unknown; leave it."""

    __slots__ = ()


class ConfigurationError(WeftError, ValueError):
    """An argument or an environment variable is invalid, or contradicts another."""


class ConfigurationMismatchError(ConfigurationError):
    """The ranks passed different arguments to a collective call."""


class AddressError(ConfigurationError):
    """The address of rank 0 is missing or cannot be resolved."""


class SecretError(ConfigurationError):
    """The shared secret is missing, unreadable or different from the other ranks' secret."""


class WorldSizeError(ConfigurationError):
    """The ranks have different world sizes."""


class RankTakenError(ConfigurationError):
    """Two processes claim the same rank."""


class SizeError(WeftError, ValueError):
    """A size exceeds a limit; the message names the excess."""


class ShapeError(WeftError, ValueError):
    """An array has the wrong shape, dtype or layout."""


class ExpertError(WeftError, ValueError):
    """A token names an expert that does not exist, or one twice."""


class ListenError(WeftError, OSError):
    """Rank 0 cannot listen on its address."""


class RendezvousError(WeftError):
    """The rendezvous timed out before all ranks had joined."""


class WireVersionError(WeftError):
    """The ranks run Weft versions with different wire protocols."""


class NoRouteError(WeftError):
    """No provider that both ranks have reaches a peer."""


class ConnectError(WeftError, ConnectionError):
    """A connection to a peer failed."""


class ProviderError(WeftError):
    """A provider cannot be used on this machine."""


class DeviceError(WeftError, RuntimeError):
    """An error from a GPU, the driver or the kernel compiler, here or at a peer.

    The error may belong to earlier work on the GPU, even from other libraries.
    """


class AllocationError(WeftError, MemoryError):
    """Memory could not be allocated."""


class RegionError(WeftError, ValueError):
    """Memory of this kind cannot be used in this way."""


class WrongGroupError(WeftError, ValueError):
    """A region or counter from another communicator, or from the group before `reform`."""


class OutOfRangeError(WeftError, IndexError):
    """A slice is not inside the region, or an index not inside the embedding table."""


class UnknownError(WeftError, LookupError):
    """A region, counter, rank or request that does not exist."""


class NotSharedError(UnknownError):
    """A counter was used before `Communicator.share`."""


class LimitError(WeftError):
    """A limit set at construction was reached."""


class CreditError(WeftError):
    """A round without its owner's credit, or one that is over, or a credit without arrivals."""


class StageError(WeftError):
    """A call came out of order."""


class AlreadySharedError(StageError):
    """A counter was shared a second time."""


class ChannelInUseError(WeftError):
    """All channels are held by rounds that were not released."""


class CapacityError(WeftError):
    """A rank would receive more tokens than the limit; all ranks raise this."""


class WaitTimeoutError(WeftError, TimeoutError):
    """A wait timed out. The operation goes on: the wait may be repeated."""


class GroupPoisonedError(WeftError):
    """The group has ended: a rank requested it, or a fatal error occurred.

    After any such error the group's memory is not used again; `Communicator.reform` makes a new
    group with the survivors.
    """


class PeerLostError(GroupPoisonedError, ConnectionError):
    """A rank's process has ended, or is silent for longer than the silence timeout."""


class PeerLeftError(GroupPoisonedError):
    """A rank left the group while others had operations with it."""


class WriteFailedError(GroupPoisonedError):
    """A write failed; the destination is undefined."""


class ProtocolError(GroupPoisonedError):
    """A peer violated the protocol."""


class MalformedError(ProtocolError):
    """A peer sent a malformed message."""


class ExcludedError(GroupPoisonedError):
    """The others formed a new group without this rank."""


class SupersededError(WeftError):
    """A newer group was formed in place of this one."""


class ClosedError(WeftError):
    """The communicator or the all-to-all was closed."""


class ForkError(WeftError):
    """The process was forked after `weft.init()`."""


class SimulationError(WeftError):
    """A simulated schedule deadlocks, or a message in it can never arrive."""


class SystemCallError(WeftError, OSError):
    """A system call failed."""
