from setuptools import find_packages, setup

# The presets lie in configs/, beside the code, and are installed inside the package: found by name without a clone.
setup(
    packages=[*find_packages(include=["bert_jax*", "data_prep*"]), "bert_jax.configs", "bert_jax.configs.studies"],
    package_dir={"bert_jax.configs": "configs"},
    package_data={
        "bert_jax": ["py.typed"],
        "data_prep": ["py.typed"],
        "bert_jax.analysis.viewer": ["page.html", "viewer.js"],
        "bert_jax.doctor": ["curves/*.json"],
        "bert_jax.launchers": ["*.sh", "*.sbatch", "*.yaml"],
        "bert_jax.planning": ["gpus/*.txtpb"],
        "bert_jax.report": ["page.html"],
    },
)
