"""The names of Airflow whose modules differ between its versions from 3.0 on."""

try:
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
    from airflow.sdk.log import mask_secret
except ImportError:
    from airflow.exceptions import AirflowException, AirflowFailException  # type: ignore[attr-defined,no-redef]
    from airflow.sdk.execution_time.secrets_masker import mask_secret  # type: ignore[no-redef]

__all__ = ["AirflowException", "AirflowFailException", "mask_secret"]
