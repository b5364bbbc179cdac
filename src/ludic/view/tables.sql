CREATE TABLE files (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, kind TEXT, inode INTEGER, size INTEGER, tail BLOB,
    rows INTEGER DEFAULT 0);
CREATE TABLE blocks (id INTEGER PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER);
CREATE TABLE notes (file TEXT, start INTEGER, what TEXT);
CREATE TABLE rollouts (
    n INTEGER PRIMARY KEY, block INTEGER, line INTEGER, source TEXT, $columns);
CREATE INDEX rollouts_id ON rollouts (id);
CREATE INDEX rollouts_grp ON rollouts (grp);
CREATE INDEX rollouts_episode ON rollouts (episode);
CREATE INDEX rollouts_parent ON rollouts (parent) WHERE parent != '';
CREATE INDEX rollouts_rewards ON rollouts (upd, reward, source);
CREATE TABLE facets (name TEXT, value TEXT, count INTEGER, PRIMARY KEY (name, value));
CREATE TABLE trained (
    rollout TEXT, upd INTEGER, weight REAL, tokens INTEGER, block INTEGER, line INTEGER);
CREATE INDEX trained_rollout ON trained (rollout);
CREATE VIRTUAL TABLE words USING fts5 (text, content='', columnsize=0);
