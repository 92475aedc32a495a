"""Array types with shapes for signatures: from jaxtyping if it is installed, else aliases of `jax.Array`.

The test suite installs jaxtyping and checks every annotation at run time; training does not require it.

The letters of all shapes, in annotations and in names of arrays such as `hidden_BSH`: B rows, S positions (T: those
attended to), K packed examples of a row, M predictions of a row, L layers, N heads, D width of a head, H hidden,
F feed-forward, E width of the embedding tables, V vocabulary, C labels, W width of a text's vector; other axes are
written in lower case.
"""

try:
    from jaxtyping import Array, Bool, Float, Int, Int8, Key, UInt32
except ModuleNotFoundError:
    from jax import Array

    class _Unchecked:
        """An array of any shape."""

        def __class_getitem__(cls, item: object) -> type:
            return Array

    Bool = Float = Int = Int8 = Key = UInt32 = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int", "Int8", "Key", "UInt32"]
