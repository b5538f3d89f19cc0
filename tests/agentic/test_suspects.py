"""Suspicion comes from deaths, proof from a death alone, and only suspicion goes away."""

from __future__ import annotations

from roll.agentic.pool import EpisodeKey, Suspects

ONE, OTHER = EpisodeKey("a", 1), EpisodeKey("a", 2)


def test_who_was_near_two_deaths_must_be_alone():
    suspects = Suspects()
    suspects.process_died([ONE, OTHER])
    assert not suspects.must_be_alone(ONE)
    suspects.process_died([ONE])
    assert suspects.must_be_alone(ONE) and not suspects.must_be_alone(OTHER)
    assert not suspects.must_be_alone(EpisodeKey("b", 1))


def test_a_death_counts_once_however_many_episodes_of_a_seed_were_there():
    suspects = Suspects()
    suspects.process_died([ONE, ONE, ONE])
    assert not suspects.must_be_alone(ONE)


def test_a_suspect_that_ends_well_alone_begins_with_nothing_against_it():
    suspects = Suspects()
    for _ in range(3):
        suspects.process_died([ONE, OTHER])
    suspects.acquit(ONE)
    assert not suspects.must_be_alone(ONE) and suspects.must_be_alone(OTHER)
    suspects.process_died([ONE])
    assert not suspects.must_be_alone(ONE)
    suspects.process_died([ONE])
    assert suspects.must_be_alone(ONE)


def test_proof_is_for_good():
    suspects = Suspects()
    suspects.prove(ONE)
    suspects.acquit(ONE)
    assert suspects.must_be_alone(ONE) and not suspects.must_be_alone(OTHER)
