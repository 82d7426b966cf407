"""An environment of skyrl-gym whose observations have pictures, as OpenAI's messages have them."""

import base64
import io

from PIL import Image
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Screens(BaseTextEnv):
    """Shows two pictures, then text, then ends."""

    def __init__(self, env_config, extras):
        super().__init__()

    def step(self, action):
        self.turns += 1
        content = io.BytesIO()
        Image.new("RGB", (56, 56), (255, 0, 0)).save(content, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        said = [{"type": "text", "text": "It is "}, picture, {"type": "text", "text": " now"}]
        shown = [{"role": "user", "content": said}, {"role": "user", "content": [picture]}]
        observations = shown if self.turns == 1 else [{"role": "user", "content": "dark"}]
        return BaseTextEnvStepOutput(observations=observations, reward=1.0, done=self.turns == 3, metadata={})
