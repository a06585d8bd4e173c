"""Shape annotations (`Float[Tensor, "head n n"]`): jaxtyping's where it is installed, plain words where it is not.

The tests check them by jaxtyping's import hook; at run time they cost nothing, and the kernels import
wherever torch does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int
else:
    try:
        from jaxtyping import Bool, Complex, Float, Int
    except ImportError:

        class _Words:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Complex = Float = Int = _Words

__all__ = ["Bool", "Complex", "Float", "Int"]
