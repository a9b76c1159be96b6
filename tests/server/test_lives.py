"""A replica starts again as a whole: who is expected to end, and which life its ranks read."""

from __future__ import annotations

from minipar.server.lives import Life, Lives


def test_one_death_begins_a_life_of_the_whole_replica(tmp_path):
    folder = str(tmp_path)

    def number(replica):
        return Life(folder, replica, dying=True).number

    lives = Lives(folder, [(0, 1, 2), (3, 4, 5), (6,)])
    assert lives.died(1)
    assert (number(0), number(1)) == (1, 0)
    lives.willing.add(2)
    assert not lives.died(2), "it has ended itself, since rank 1 was gone"
    assert lives.died(0), "it has died of its own in the meantime, which all of them had to anyway"
    assert number(0) == 1
    lives.willing.add(0)
    assert not lives.died(0), "it has lost a peer whose death nobody has heard of yet"
    assert number(0) == 2
    assert lives.died(1), "this one"
    assert number(0) == 2
    assert lives.died(1), "and once more, before rank 2 has ended"
    assert number(0) == 3
    assert lives.died(2)
    assert lives.died(0)
    assert (number(0), number(1)) == (3, 0)
    assert lives.died(6)
    assert lives.died(7), "a server"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["life of 0"]


def test_nobody_waits_for_a_rank_that_has_come_to_its_end(tmp_path):
    with Life(str(tmp_path), 0, dying=True) as first:
        assert not first.over
        first.finish()
    assert Life(str(tmp_path), 0, dying=True).over
    assert not Life(str(tmp_path), 1, dying=True).over
    with Life(str(tmp_path), 1, dying=False) as alone:
        alone.void()
        alone.finish()
    assert not Life(str(tmp_path), 1, dying=True).over, "where nothing starts again, nothing is said"
