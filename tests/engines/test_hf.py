"""`HFEngine`: features of pictures."""

from atomrl.engines.generation import generate
from tests.vision.test_conformance import Case


def test_each_picture_is_computed_once_until_a_tower_is_sent(tmp_path):
    case = Case("qwen2_5_vl", tmp_path)
    backends = case.backend(model={"lora": {"rank": 2}}), case.backend()
    computed = [case.engine.vision.computed]
    for version, backend in enumerate(backends):
        case.engine.update_weights(backend.weight_update(version, adapters_alone=backend is backends[0]))
        again = generate(case.engine, case.prompts, case.sampling)
        assert [item.token_ids for item in again] == [item.token_ids for item in case.trajectories]
        computed.append(case.engine.vision.computed)
    assert computed == [4, 4, 8]
