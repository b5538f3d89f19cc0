"""Shares of devices become device mappings, the same on every node, or are refused with what would do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.check.config import check_config
from roll.check.plan import plan
from roll.configs.derived import place_shares
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, dump_config, load_config, parse_yaml
from roll.configs.run import RLVRConfig


def shared(tree, shares, devices=4, nodes=1):
    """The tree with shares in place of its device mappings."""
    cluster = {"num_devices_per_node": devices, "num_nodes": nodes, "shares": shares}
    tree["cluster"] = cluster | ({"address": "auto"} if nodes > 1 else {})
    for role in ("actor_train", "actor_infer"):
        tree[role].pop("device_mapping", None)
    return tree


def devices_of(config):
    sections = {"train": config.actor_train, "infer": config.actor_infer, "reference": config.reference}
    sections |= {"critic": config.critic, "math": config.rewards["math"]}
    return {
        name: parse_device_mapping(section.device_mapping)
        for name, section in sections.items()
        if section is not None and section.device_mapping is not None
    }


def problems(tree):
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_tree(tree))
    return {each.path: f"{each.message}. {each.remedy}" for each in caught.value.problems}


def test_each_node_has_both(tree):
    config = check_config(config_from_tree(shared(tree, {"train": 0.5, "infer": 0.5}, nodes=2)))
    assert devices_of(config) == {"train": [0, 1, 4, 5], "infer": [2, 3, 6, 7]}


def test_shares_are_dealt_out_in_the_order_written(tree):
    config = config_from_tree(shared(tree, {"infer": 0.25, "train": 0.75}, nodes=2))
    assert devices_of(config) == {"train": [1, 2, 3, 5, 6, 7], "infer": [0, 4]}


def test_training_roles_share_the_trainers_devices_unless_they_have_a_share(tree):
    tree |= {"reference": {}, "critic": {}, "use_kl_loss": True, "adv_estimator": "gae"}
    together = config_from_tree(shared(tree, {"train": 0.75, "infer": 0.25}))
    assert devices_of(together) == {"train": [0, 1, 2], "critic": [0, 1, 2], "reference": [0, 1, 2], "infer": [3]}
    apart = config_from_tree(shared(tree, {"train": 0.25, "critic": 0.25, "reference": 0.25, "infer": 0.25}))
    assert devices_of(apart) == {"train": [0], "critic": [1], "reference": [2], "infer": [3]}


def test_a_reward_model_has_a_share_by_its_name(tree):
    tree["rewards"] = {"math": {"verifier": "reward_model"}}
    tree = shared(tree, {"train": 0.5, "infer": 0.25, "rewards.math": 0.25}, nodes=2)
    assert devices_of(config_from_tree(tree))["math"] == [3, 7]


def test_a_role_without_a_share_has_a_mapping(tree):
    tree = shared(tree, {"train": 0.5})
    tree["actor_infer"]["device_mapping"] = "2-3"
    config = check_config(config_from_tree(tree))
    assert devices_of(config) == {"train": [0, 1], "infer": [2, 3]}


def test_a_reference_that_is_the_trainer_without_adapters_stays_so(tree):
    tree |= {"reference": {}, "use_kl_loss": True}
    tree["actor_train"]["model_args"] = {"lora_target": "all-linear"}
    config = check_config(config_from_tree(shared(tree, {"train": 0.5, "infer": 0.5})))
    assert "actor_train without its adapters" in plan(config)


def test_only_mappings_are_left_and_the_plan_and_the_saved_file_show_them(tree, write):
    config = check_config(config_from_tree(shared(tree, {"train": 0.5, "infer": 0.5}, nodes=2)))
    assert config.cluster.shares == {}
    lines = plan(config).splitlines()
    assert "on device 0-1, 4-5 " in next(line for line in lines if line.startswith("actor_train"))
    assert "on device 2-3, 6-7 " in next(line for line in lines if line.startswith("actor_infer"))
    saved = dump_config(config)
    assert parse_yaml(saved, "saved")["actor_train"]["device_mapping"] == "0-1, 4-5"
    assert load_config(write(saved)) == config


def test_overrides_of_the_command_line_place_as_well(tree, write):
    path = write(shared(tree, {"train": 0.5, "infer": 0.5}))
    config = load_config(path, ["cluster.shares.infer=0.25", "cluster.num_nodes=2", "cluster.address=auto"])
    assert devices_of(config) == {"train": [0, 1, 4, 5], "infer": [2, 6]}


def test_a_share_beside_a_mapping_is_refused(tree):
    tree = shared(tree, {"train": 0.5, "infer": 0.5}) | {"critic": {"device_mapping": [0]}}
    tree["actor_infer"]["device_mapping"] = [3]
    found = problems(tree)
    assert "actor_infer.device_mapping is [3]" in found["cluster.shares.infer"]
    assert "critic.device_mapping is [0]" in found["cluster.shares.train"]
    assert "remove one of the two" in found["cluster.shares.infer"]


@pytest.mark.parametrize(
    ("shares", "path", "words"),
    [
        ({"train": 0.4, "infer": 0.5}, "cluster.shares.train", "is 1.6, no whole number. write 0.25 (1 of 4) or 0.5"),
        ({"train": 0.9, "infer": 0.05}, "cluster.shares.infer", "is 0.2, no whole number. write 0.25 (1 of 4), or"),
        ({"train": 0.001, "infer": 0.5}, "cluster.shares.train", "write 0.25 (1 of 4), or change"),
        ({"train": 0.75, "infer": 0.5}, "cluster.shares", "0.75 + 0.5 = 1.25, more than a node has"),
        ({"train": 0, "infer": 1}, "cluster.shares.train", "write a number above 0"),
        ({"train": 2, "infer": 0.5}, "cluster.shares.train", "write a number above 0 and at most 1"),
        ({"train": float("nan"), "infer": 0.5}, "cluster.shares.train", "is no share"),
        ({"actor_train": 0.5, "infer": 0.5}, "cluster.shares.actor_train", "did you mean `train`?"),
        ({"train": 0.5, "critic": 0.5}, "cluster.shares.critic", "this run has no such share"),
        ({"train": "half"}, "cluster.shares.train", "is not a number"),
        ({"train": 0.5}, "actor_infer.device_mapping", "no devices are given"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_its_remedy(tree, shares, path, words):
    assert words in problems(shared(tree, shares))[path]


@pytest.mark.parametrize(("shares", "sizes"), [([0.33, 0.33, 0.33], [1, 1, 1]), ([0.667, 0.333], [2, 1])])
def test_a_third_may_be_written_with_two_digits(tree, shares, sizes):
    tree |= {"critic": {}, "adv_estimator": "gae"}
    written = dict(zip(("train", "infer", "critic"), shares, strict=False))
    found = devices_of(config_from_tree(shared(tree, written, devices=3)))
    assert [len(found[name]) for name in written] == sizes


@pytest.mark.parametrize("cluster", [{"num_devices_per_node": 0}, {"num_devices_per_node": 10**9}, {"num_nodes": -1}])
def test_a_cluster_that_cannot_be_is_reported_as_such(tree, cluster):
    tree = shared(tree, {"train": 0.5, "infer": 0.5})
    tree["cluster"] |= cluster
    assert f"cluster.{next(iter(cluster))}" in problems(tree)


@given(st.integers(1, 16), st.integers(1, 5), st.data())
def test_every_even_split_gives_each_node_the_same_devices(size, nodes, data):
    train = data.draw(st.integers(1, size))
    infer = data.draw(st.integers(0, size - train))
    config = RLVRConfig()
    config.cluster.num_devices_per_node, config.cluster.num_nodes = size, nodes
    config.cluster.shares = {"train": train / size, **({"infer": infer / size} if infer else {})}
    assert place_shares(config) == []
    roles = {"train": config.actor_train} | ({"infer": config.actor_infer} if infer else {})
    for node in range(nodes):
        owned = {name: parse_device_mapping(role.device_mapping) for name, role in roles.items()}
        here = {
            name: [device % size for device in devices if device // size == node] for name, devices in owned.items()
        }
        assert here["train"] == list(range(train))
        assert here.get("infer", []) == list(range(train, train + infer))
