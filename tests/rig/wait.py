"""The one waiting loop of the tests: a condition with a deadline. And the one place where time is let pass, for a fault that lasts."""
import time


def until(condition, seconds=10.0, what="the condition", every=0.02):
    """Returns the first true value of condition(); raises with its last value when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what} did not come within {seconds} s; last value: {value!r}")
        time.sleep(every)


def fault_lasts(seconds):
    """Time that passes because a fault is tested that lasts so long: a process that stands still for 30 s. Never to give something time to come."""
    time.sleep(seconds)
