"""What a node writes down before it acts."""
import host
import pytest
import wait
from client import say, shell, turns


@pytest.mark.guest
def test_who_waits_for_a_boot_is_in_the_journal(make_stack):
    """Both runs are in the journal while one boots and the other waits for its turn: a node that is killed now knows of both."""
    stack = make_stack(node={"max_vms": 2, "max_concurrent_boots": 1})
    node, client = stack.node, stack.client()
    made = [client.create(prompt=turns(shell("sleep 100"), say("never said")))["id"] for _ in range(2)]
    wait.until(lambda: len(host.children(f"{node.state_dir}/journal")) == 2, 60, "the second run in the journal", every=0.002)
    assert "from=probe to=start" not in node.log.read_text(errors="replace"), "the second run was written down when the first had booted"
    for run in made:
        client.cancel(run)
    for run in made:
        client.settled(run)
    node.clean()
    assert host.children(f"{node.state_dir}/journal") == []
