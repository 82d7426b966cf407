"""Tools and interactions with verl's protocols, for tests."""

import asyncio
from types import SimpleNamespace

CLASSES = __name__


def tool(kind="Check", name="check", **config):
    """An item of verl's file of tools."""
    parameters = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    function = {"name": name, "description": "Checks an answer.", "parameters": parameters}
    schema = {"type": "function", "function": function}
    return {"class_name": f"{CLASSES}.{kind}", "config": {"type": "native", **config}, "tool_schema": schema}


class Tool:
    """What verl's base class gives a tool."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema, self.name, self.open = config, tool_schema, tool_schema.function.name, {}

    async def create(self, instance_id=None, **kwargs):
        instance_id = instance_id or f"{self.name}-{id(kwargs)}"
        self.open[instance_id] = kwargs["create_kwargs"]
        return instance_id, None

    async def release(self, instance_id, **kwargs):
        del self.open[instance_id]


class Check(Tool):
    """Compares an answer with the row's."""

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep(0)
        if parameters["answer"] == "break":
            raise RuntimeError("it is broken")
        if parameters["answer"] == "wait":
            await asyncio.sleep(60)
        data, truth = kwargs["agent_data"], self.open[instance_id].get("ground_truth")
        seen = f"{data.assistant_turns} {[message['role'] for message in data.messages]} {data.tool_rewards}"
        right = parameters["answer"] == truth
        text = f"{self.config['word']} {seen}" if right else "no"
        return SimpleNamespace(text=text * self.config.get("times", 1)), -0.05, {}


class Draw(Tool):
    async def execute(self, instance_id, parameters, **kwargs):
        from PIL import Image

        kind = parameters.get("kind", "image")
        return SimpleNamespace(text=type(self.tool_schema).__name__, **{kind: [Image.new("RGB", (28, 28))]}), None, None


class Quiz:
    """Says whether a turn is the answer."""

    def __init__(self, config):
        self.config, self.open = config, {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.open[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1] == {"role": "assistant", "content": self.open[instance_id]}
        return right, f"{self.config['no']} ({len(messages)}, {len(self.open)})", float(right), {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.open[instance_id]


class Shy(Quiz):
    """Its end takes no id, as that of verl's base class."""

    async def finalize_interaction(self):
        raise AssertionError
