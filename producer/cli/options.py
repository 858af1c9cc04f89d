from common.options import config_option, json_option

__all__ = ["config_option", "json_option"]
