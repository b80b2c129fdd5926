"""The one waiting loop of the tests: a condition with a deadline."""
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
