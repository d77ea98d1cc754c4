from __future__ import annotations

import pytest

from mindx_elastic.errors import UsageError
from mindx_elastic.train.callbacks import CallbackList, CallbackParams, as_callback_list


def test_params_read_as_attributes_and_as_a_dict() -> None:
    params = CallbackParams(cur_step_num=3)
    params.extra = 5
    assert (params.cur_step_num, params["extra"], params.get("none", 7)) == (3, 5, 7)
    with pytest.raises(AttributeError, match="there are cur_step_num, extra"):
        _ = params.other


def test_callbacks_alone_in_a_list_or_not_at_all() -> None:
    one = CallbackList([])
    assert as_callback_list(one) == [one]
    assert as_callback_list(None) == []
    assert as_callback_list((one,)) == [one]
    with pytest.raises(UsageError, match="callbacks=3"):
        as_callback_list(3)  # type: ignore[arg-type]
