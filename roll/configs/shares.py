"""Shares of each node's devices, another way to write device mappings. After the loader there are only mappings.

Every node gives each share its devices, side by side in the order written, so that each node has them all. `train` is
for actor_train, and for critic, reference and teacher unless they have shares of their own: these roles take turns, as
roles of one mapping do. `infer` is for actor_infer; any other share has the name of its role.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll.configs.derived import reward_models, role_sections, total_devices
from roll.configs.devices import MAX_DEVICES, compact
from roll.configs.errors import ConfigProblem, choose_among, count, shown
from roll.configs.rewards import RewardConfig
from roll.configs.roles import WorkerConfig
from roll.configs.run import RunConfig

TAKING_TURNS = ("actor_train", "critic", "reference", "teacher")
"""Roles of the share `train`."""
_ROUNDING = 0.02
"""Part of a device by which a share may miss a whole number: 0.33 is a third."""


def place_shares(config: RunConfig) -> list[ConfigProblem]:
    """Replace `cluster.shares` by the device mappings that they come to; return the reasons why that is impossible."""
    cluster, shares = config.cluster, config.cluster.shares
    if not shares or not 0 < total_devices(config) <= MAX_DEVICES or cluster.num_nodes < 1:
        return []  # rules reject such a cluster
    roles = _roles_of_shares(config)
    sections = _sections(config)
    problems = list(_problems(config, roles))
    if problems:
        return problems
    first = 0
    for name, share in shares.items():
        size = round(share * cluster.num_devices_per_node)
        starts = [node * cluster.num_devices_per_node + first for node in range(cluster.num_nodes)]
        for role in roles[name]:
            sections[role].device_mapping = compact(start + each for start in starts for each in range(size))
        first += size
    cluster.shares = {}
    return []


def _sections(config: RunConfig) -> dict[str, WorkerConfig | RewardConfig]:
    return {**role_sections(config), **reward_models(config)}


def _roles_of_shares(config: RunConfig) -> dict[str, list[str]]:
    """Return the roles of each share that this run can have, by its name."""
    names = list(_sections(config))
    turns = [role for role in TAKING_TURNS if role in names and role not in config.cluster.shares]
    others = {name: [name] for name in names if name not in ("actor_train", "actor_infer")}
    engine = {"infer": ["actor_infer"]} if "actor_infer" in names else {}
    return {"train": turns, **engine, **others}


def _problems(config: RunConfig, roles: dict[str, list[str]]) -> Iterator[ConfigProblem]:
    shares, devices = config.cluster.shares, config.cluster.num_devices_per_node
    sections = _sections(config)
    for name, share in shares.items():
        path = f"cluster.shares.{name}"
        if name not in roles:
            yield ConfigProblem(path, "this run has no such share", choose_among(name, roles))
            continue
        for role in roles[name]:
            given = sections[role].device_mapping
            if given is not None:
                message = f"{shown(share)}, but {role}.device_mapping is {shown(given)}"
                yield ConfigProblem(path, message, "remove one of the two; both name the devices of a role")
        if not 0 < share <= 1:
            yield ConfigProblem(path, f"{shown(share)} is no share", "write a number above 0 and at most 1")
            continue
        number = share * devices
        if round(number) == 0 or abs(number - round(number)) > _ROUNDING:
            even = [each for each in (math.floor(number), math.ceil(number)) if each > 0]
            ways = " or ".join(f"{each / devices:.4g} ({each} of {devices})" for each in even)
            message = f"{shown(share)} of the {count(devices, 'device')} of a node is {number:.4g}, no whole number"
            remedy = f"write {ways}, or change `cluster.num_devices_per_node`"
            yield ConfigProblem(path, message, remedy)
    total = sum(shares.values())
    if total * devices > devices + _ROUNDING * len(shares):
        message = f"{' + '.join(f'{share:g}' for share in shares.values())} = {total:g}, more than a node has"
        yield ConfigProblem("cluster.shares", message, "lower the shares; together they are at most 1")
