"""Break everything, record what each worker did, and let a checker read the record."""
