"""Its place makes `tiny` and `oracle` importable from every folder of tests, whichever is run alone."""

from jaxtyping import install_import_hook

# Shapes in signatures are checked here, and only here: at run time they cost nothing. Left out are modules whose tests
# hand them a wrong word on purpose (alignment.linear, alignment.rotary), and the abstract classes (groups.group).
install_import_hook(
    [
        *(f"isobasin.groups.{name}" for name in ("heads", "linear", "monomial", "product", "rotary")),
        *(f"isobasin.alignment.{name}" for name in ("newton", "headcost", "reference", "verification")),
        "isobasin.symmetries.attention",
    ],
    "beartype.beartype",
)
