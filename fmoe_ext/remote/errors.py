"""Errors of calls to experts elsewhere."""


class RemoteError(Exception):
    """A call to a remote expert failed; the message names the expert, where it was asked, and what was said."""


class CallTimeout(RemoteError, TimeoutError):
    """No answer came before the deadline."""


class ExpertGone(RemoteError):
    """Nobody who can be reached hosts the expert."""


class Busy(RemoteError):
    """The server has more to do than it takes, or the caller sends more than its rate allows."""


class Refused(RemoteError):
    """The server will not do this, now or later: wrong tensors, a missing token, a gradient that is too old."""


class NoLeader(RemoteError):
    """The server is not the one that takes the gradients of this expert now."""


class Cheated(RemoteError):
    """A server's answer is not what the expert's weights give."""
