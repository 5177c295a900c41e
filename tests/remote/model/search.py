"""Explicit-state search: every reachable state keeps the invariants and can reach a good one without faults."""

from tests.remote.model.protocol import Violation


def search(protocol, first, max_states=10_000_000):
    """The number of states; Violation with the trace that leads to one that is wrong or stuck."""
    numbers, states, came_from = {first: 0}, [first], [(-1, "start")]
    backward = [[]]  # state: those that reach it by a step that is no fault
    at = 0
    while at < len(states):
        state = states[at]
        try:
            for name, is_fault, after in protocol.steps(state):
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(states)
                    states.append(after)
                    came_from.append((at, name))
                    backward.append([])
                    protocol.check(after)
                    if number > max_states:
                        raise MemoryError(f"more than {max_states} states")
                if not is_fault:
                    backward[number].append(at)
        except Violation as error:
            raise Violation(
                f"{error}\n" + _trace(came_from, len(states) - 1 if _is_new(came_from, at) else at)
            ) from None
        at += 1
    _check_progress(protocol, states, backward, came_from)
    return len(states)


def _is_new(came_from, at):
    return came_from[-1][0] == at


def _check_progress(protocol, states, backward, came_from):
    waiting = [number for number, state in enumerate(states) if protocol.is_good(state)]
    can = set(waiting)
    while waiting:
        for before in backward[waiting.pop()]:
            if before not in can:
                can.add(before)
                waiting.append(before)
    if len(can) < len(states):
        stuck = next(number for number in range(len(states)) if number not in can)
        raise Violation("nothing good can follow\n" + _trace(came_from, stuck) + f"\n{states[stuck]}")


def _trace(came_from, number):
    names = []
    while number >= 0:
        number, name = came_from[number][0], came_from[number][1]
        names.append(name)
    return "\n".join(reversed(names))
