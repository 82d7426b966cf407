from typing import Literal

import pytest

from atomrl.atoms._options import _check_option


def test_a_misspelt_option_is_refused_without_the_type_checker_of_the_tests():
    _check_option("position", "token", Literal["column", "token"])
    with pytest.raises(ValueError, match="position='tokens' is not one of column, token"):
        _check_option("position", "tokens", Literal["column", "token"])
