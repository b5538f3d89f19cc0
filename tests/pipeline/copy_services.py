"""What the runs of tests/pipeline/test_service_runs.py use beside themselves: a verifier, and a game with MCP tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gymnasium
from copy_games import Copy

from roll.agentic.tools.environment import ToolEnv, ToolSettings
from roll.agentic.tools.mcp import McpServer

MCP_SERVER = Path(__file__).parents[1] / "agentic" / "tools" / "tiny_mcp_server.py"


def repeated(task, messages):
    """The share of the user's turns that the policy has repeated."""
    said = [message["content"] for message in messages]
    right = sum(answer == asked for asked, answer in zip(said[::2], said[1::2], strict=True))
    return {"reward": right / 2, "success": right == 2, "metrics": {"turns_said": len(said) / 2}}


class Adding(gymnasium.Wrapper):
    """A game of copying in which every digit but 0 is a call: the MCP server adds 1 to it. 0 is the policy's answer.

    So a model that knows digits only calls tools.
    """

    def __init__(self) -> None:
        tools = [McpServer(command=sys.executable, args=[str(MCP_SERVER)], start_timeout_seconds=60.0)]
        super().__init__(ToolEnv(Copy(turns=1), tools, ToolSettings(answer_role="user", describe_in_prompt=True)))

    def reset(self, **arguments):
        text, info = self.env.reset(**arguments)
        assert "adds two numbers" in info.pop("system").lower()
        return text, info

    def step(self, action):
        if not action.isdigit() or action == "0":
            return self.env.step(action)
        call = {"name": "add", "arguments": {"a": int(action), "b": 1}}
        text, *rest, info = self.env.step(f"<tool_call>{json.dumps(call)}</tool_call>")
        assert text == f"<tool_response>\n{int(action) + 1}\n</tool_response>"
        return text, *rest, info
