-- The ledger: at most one row for a job and a period, which is its planned time (see ledger.py).
create table {{cookiecutter.project_slug}}.job_run (
    job text not null check (job <> ''),
    period timestamptz not null,
    state text not null check (state in ('running', 'retry', 'succeeded', 'failed', 'skipped')),
    attempt integer not null default 0 check (attempt >= 0),
    role text, -- whose lease `epoch` belongs to; both null where no lease was held
    epoch bigint check ((epoch is null) = (role is null)),
    instance text,
    started_at timestamptz, -- of the last attempt
    finished_at timestamptz,
    retry_at timestamptz check ((retry_at is not null) = (state = 'retry')),
    error text, -- of the last attempt that failed
    primary key (job, period)
);

-- What a new leader has to look at first: claims left behind, and attempts to repeat.
create index job_run_unfinished on {{cookiecutter.project_slug}}.job_run (job, period) where state in ('running', 'retry');

-- The retention sweep goes by age.
create index job_run_period on {{cookiecutter.project_slug}}.job_run (period);
