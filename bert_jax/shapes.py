"""Array types with shapes for signatures: from jaxtyping if it is installed, else aliases of `jax.Array`.

The test suite installs jaxtyping and checks every annotation at run time; training does not require it.
"""

try:
    from jaxtyping import Array, Bool, Float, Int, Key, UInt32
except ModuleNotFoundError:
    from jax import Array

    class _Unchecked:
        """An array of any shape."""

        def __class_getitem__(cls, item: object) -> type:
            return Array

    Bool = Float = Int = Key = UInt32 = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int", "Key", "UInt32"]
