"""A test that stands still fails, and the tests after it run: pytest-timeout does it, as this project asks it to."""


def test_a_test_that_stands_still_is_ended_with_a_traceback_of_every_thread(pytestconfig):
    limits = float(pytestconfig.getini("timeout")), float(pytestconfig.getini("faulthandler_timeout"))
    assert 0 < limits[0] < limits[1] < 600, "first the test ends; only where it cannot, its process"
    assert pytestconfig.getini("timeout_method") == "signal", "a thread would end the process, and all other tests"
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
