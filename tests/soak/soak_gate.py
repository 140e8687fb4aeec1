"""What the gates share: their register, the checks of one, and looking at a server meanwhile."""
import contextlib
import threading

from soak_tools import Clients, ids_request

GATES = {}


def gate(function):
    GATES[function.__name__] = function
    return function


class Report:
    """The checks of one gate."""

    def __init__(self, name):
        self.name, self.ok = name, True

    def at_most(self, what, value, limit, unit=""):
        self.line(what, value, f"at most {limit:.4g}{unit}", value <= limit, unit)

    def at_least(self, what, value, limit, unit=""):
        self.line(what, value, f"at least {limit:.4g}{unit}", value >= limit, unit)

    def equal(self, what, value, wanted):
        self.line(what, value, f"{wanted}", value == wanted)

    def line(self, what, value, limit, ok, unit=""):
        self.ok = self.ok and ok
        shown = f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"
        print(f"{self.name:4} {'pass' if ok else 'FAIL'}  {what}: {shown} ({limit})", flush=True)


@contextlib.contextmanager
def watching(server, every, look):
    """Calls look(Figures) every so many seconds meanwhile."""
    done = threading.Event()

    def run():
        while not done.wait(every):
            look(server.scrape())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def prompt_of(randoms, low, high):
    return [randoms.randrange(3, 8000) for _ in range(randoms.randint(low, high))]


async def first_answer(server):
    async with Clients(server.target, 1) as clients:
        await clients.whole(ids_request([5, 6], 1))
