"""The dataset card of a Parquet export: README.md as dataset hubs show it, and `load_dataset` reads its head."""

from producer.export.manifest import Manifest


def card(manifest: Manifest) -> str:
    """Markdown with the splits and their files in its head; with one that has no rows, `load_dataset` loads none."""
    there = [name for name, split in manifest.splits.items() if split.rows]
    splits = "".join(f"  - split: {name}\n    path: parquet/{name}-*.parquet\n" for name in there)
    rows = "".join(
        f"| {name} | {split.rows:,} | {split.tokens:,} | {split.trained_tokens:,} | {split.longest:,} |\n"
        for name, split in manifest.splits.items()
    )
    shown = {name: value for name, value in manifest.made_with.items() if name not in {"special_ids", "datasets"}}
    made = "".join(f"- {name}: `{value}`\n" for name, value in shown.items())
    for name, asked in manifest.made_with.get("datasets", {}).items():
        made += f"- {name}: " + ", ".join(f"{key} `{value}`" for key, value in asked.items()) + "\n"
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n\n"
        "# Token-exact answers of a served model\n\n"
        "Each row is what the model read and wrote: `input_ids` as they were sent and as they came back, `loss_mask` 0 "
        "on the prompt and 1 on what the model wrote, its end token included. Nothing was tokenized again.\n\n"
        "| split | rows | tokens | tokens to learn | longest row |\n| --- | ---: | ---: | ---: | ---: |\n"
        f"{rows}\n## Made with\n\n- tokenmill: `{manifest.tokenmill_version}`\n{made}\n"
        "`manifest.json` has the counts by dataset, and a checksum of each file.\n"
    )
