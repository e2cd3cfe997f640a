-- The role that replicas log in as. It owns nothing: it reads and writes rows, and changes no table.
--
-- Run this once as the role that runs `migrate`. That one owns database and schema, needs CREATEROLE for the first
-- statement, and no replica gets its URL:
--
--     {{cookiecutter.__distribution}} migrate
--     psql "$OWNER_URL" -v ON_ERROR_STOP=1 -f deploy/postgres/role.sql -c '\password {{cookiecutter.project_slug}}'
--
-- Running it again changes nothing. All replicas log in as this one role, since a stand-by must see the last heartbeat
-- of the leader's session: pg_stat_activity shows it to the same role, and to members of pg_read_all_stats.

begin;

do $$
begin
    create role {{cookiecutter.project_slug}} login;
exception when duplicate_object then
    null;
end
$$;

-- TEMPORARY is for the probe that looks for a pooler; without it the probe has one step less and says so.
do $$
begin
    execute format('grant connect, temporary on database %I to {{cookiecutter.project_slug}}', current_database());
end
$$;

grant usage on schema {{cookiecutter.project_slug}} to {{cookiecutter.project_slug}};
grant select, insert, update, delete on all tables in schema {{cookiecutter.project_slug}} to {{cookiecutter.project_slug}};

-- A lease row that was deleted would start again with epoch 1, and a stale leader's write would pass for a new one's.
revoke delete on {{cookiecutter.project_slug}}.lease from {{cookiecutter.project_slug}};
revoke insert, update, delete on {{cookiecutter.project_slug}}.migration from {{cookiecutter.project_slug}};

-- Tables of later migrations. Let their ids be `generated always as identity`: a sequence would need a grant too.
alter default privileges in schema {{cookiecutter.project_slug}}
grant select, insert, update, delete on tables to {{cookiecutter.project_slug}};

commit;
