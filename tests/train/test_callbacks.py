from __future__ import annotations

import pytest

from mindx_elastic.train.callbacks import CallbackParams


def test_params_read_as_attributes_and_as_a_dict() -> None:
    params = CallbackParams(cur_step_num=3)
    params.extra = 5
    assert (params.cur_step_num, params["extra"], params.get("none", 7)) == (3, 5, 7)
    with pytest.raises(AttributeError, match="there are cur_step_num, extra"):
        _ = params.other
