"""`make mutants` can begin: its list of equivalent mutants fits the code."""

from tests.mutants import AREAS, draw


def test_the_listed_mutants_are_still_in_the_code():
    assert len(draw(len(AREAS), 0, [*AREAS])) == len(AREAS)
