-- What Redis does in one step: the scripts that run on the server.
--
-- All keys of a run begin with `ludic:{run}:`, and no script touches any other. The braces put them
-- into one slot of a cluster.
--
--     requests  stream    units that are asked for; its consumer group `actors` holds the leases
--     groups    stream    finished groups; the trainer reads through its consumer group `trainer`
--     units     hash      number -> q:ENTRY:OF (asked for, put back for unit OF or nothing),
--                         d:ENTRY:BYTES:OF (finished), x:REASON:OF (dropped, which no checkpoint has
--                         yet), c (committed); those below `low` are committed and not listed
--     meta      hash      attempt, next (number), low (number), bytes, limits, policy, counters
--     actors    hash      name -> its last heartbeat: the server's time, and facts as JSON
--     trainer   string    the token of the trainer that holds the run, for as long as its lease
--     servers   hash      address -> when a server was last heard of, and facts as JSON
--     roles     hash      name -> when a process of the run was last told of, and facts as JSON
--
-- A script of the trainer first makes sure that it still holds the run. It answers `lost` where
-- another trainer does, and `emptied` where the server knows nothing of this one: its data is gone,
-- or older than the attempt. Time is the server's.
--
-- `--- piece NAME` begins a piece of a script, and `--- script NAME PIECES` a script, before which
-- come the keys' names and these pieces. The comment below it says what it takes and answers.

--- piece guard
local token, attempt, lease = ARGV[1], ARGV[2], ARGV[3]
local holder = redis.call('GET', trainer)
if holder ~= token then
  -- A lease that ran out is renewed, unless somebody else has begun an attempt since.
  local known = tonumber(redis.call('HGET', meta, 'attempt') or '0')
  if holder or known > tonumber(attempt) then return {'lost'} end
  if known < tonumber(attempt) then return {'emptied'} end
  redis.call('SET', trainer, token)
end
if redis.call('PTTL', trainer) < 0.9 * lease then redis.call('PEXPIRE', trainer, lease) end

--- piece make_groups
local function make_groups()
  redis.pcall('XGROUP', 'CREATE', requests, 'actors', '0', 'MKSTREAM')
  redis.pcall('XGROUP', 'CREATE', groups, 'trainer', '0', 'MKSTREAM')
end

--- piece holds
local function holds(name, entry)
  if redis.call('EXISTS', requests) == 0 then return false end
  local pending = redis.call('XPENDING', requests, 'actors', entry, entry, 1)
  return pending[1] and pending[1][2] == name
end

--- piece now
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)

--- script open make_groups now
-- token, lease, holder, fingerprint, max_bytes, an attempt that was before -> ok, attempt, next,
-- low, units | held | other
local token, lease, holder, fingerprint, limits = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local floor = tonumber(ARGV[6] or '0')
local held = redis.call('GET', trainer)
if held and held ~= token then
  return {'held', redis.call('HGET', meta, 'holder') or '?', redis.call('PTTL', trainer)}
end
local before = redis.call('HGET', meta, 'fingerprint')
if before and fingerprint ~= '' and before ~= fingerprint then return {'other', before} end
if fingerprint ~= '' then redis.call('HSET', meta, 'fingerprint', fingerprint) end
redis.call('SET', trainer, token, 'PX', lease)
make_groups()
local attempt = math.max(tonumber(redis.call('HGET', meta, 'attempt') or '0'), floor) + 1
redis.call('HSET', meta, 'attempt', attempt, 'holder', holder, 'opened', now, 'max_bytes', limits)
return {'ok', attempt, redis.call('HGET', meta, 'next') or '0',
        redis.call('HGET', meta, 'low') or '0', redis.call('HGETALL', units)}

--- script renew guard now
-- facts as JSON, for whoever looks
redis.call('HSET', meta, 'trainer', now .. ' ' .. ARGV[4])
return {'ok'}

--- script close
if redis.call('GET', trainer) == ARGV[1] then redis.call('DEL', trainer) end
return {'ok'}

--- script reset guard make_groups
-- low, next: forgets what the streams hold, for a course that goes on from an older checkpoint.
redis.call('DEL', requests, groups, units)
redis.call('HSET', meta, 'bytes', 0, 'low', ARGV[4], 'next', ARGV[5])
make_groups()
return {'ok'}

--- script ask guard
-- new | again, then number, number it stands in for, message -> how many were not there yet.
-- `again` also asks for units that were asked for once, and that the server has lost or that were
-- dropped.
local added = 0
local following = tonumber(redis.call('HGET', meta, 'next') or '0')
local low = tonumber(redis.call('HGET', meta, 'low') or '0')
for i = 5, #ARGV, 3 do
  local number, of, message = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local note = redis.call('HGET', units, number)
  local again = ARGV[4] == 'again' and number >= low and number < following
                and (not note or string.sub(note, 1, 1) == 'x')
  if number >= following or again then
    local entry = redis.call('XADD', requests, '*', 'n', number, 'm', message)
    redis.call('HSET', units, number, 'q:' .. entry .. ':' .. of)
    if number >= following then following = number + 1 end
    added = added + 1
  end
end
redis.call('HSET', meta, 'next', following)
return {'ok', added}

--- script take
-- name, count, lease, cursor -> cursor, [entry, number, message], taken over, full
local name, count, lease, cursor = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local found = {}
if redis.call('EXISTS', requests) == 0 or redis.call('HEXISTS', meta, 'ended') == 1 then
  return {'0-0', found, 0, 0}
end
local claimed = redis.call('XAUTOCLAIM', requests, 'actors', name, lease, cursor, 'COUNT', count)
for _, entry in ipairs(claimed[2]) do
  if entry and entry[2] then table.insert(found, {entry[1], entry[2][2], entry[2][4]}) end
end
local taken_over = #found
local full = tonumber(redis.call('HGET', meta, 'bytes') or '0')
             >= tonumber(redis.call('HGET', meta, 'max_bytes') or '9e15')
if #found < count and not full then
  local fresh = redis.call('XREADGROUP', 'GROUP', 'actors', name, 'COUNT', count - #found,
                           'STREAMS', requests, '>')
  if fresh then
    for _, entry in ipairs(fresh[1][2]) do
      table.insert(found, {entry[1], entry[2][2], entry[2][4]})
    end
  end
end
if taken_over > 0 then redis.call('HINCRBY', meta, 'taken_over', taken_over) end
return {claimed[1], found, taken_over, full and 1 or 0}

--- script append holds
-- name, entry, number, message, tokens -> ok; double: it is there already; taken over: another
-- actor holds the unit; gone: nobody asks for it. The group is appended, its double refused and its
-- request acknowledged, or none of it happens.
local name, entry, number, message, tokens = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local unit = redis.call('HGET', units, number)
local mine = holds(name, entry)
local word = 'gone'
if unit then
  local kind, place, of = string.match(unit, '^(%a):?([^:]*):?([^:]*)')
  if kind == 'q' and place == entry then
    word = mine and 'ok' or 'taken over'
  elseif kind ~= 'q' then
    word = 'double'
  end
  if word == 'ok' then
    local group = redis.call('XADD', groups, '*', 'n', number, 'm', message)
    redis.call('HSET', units, number, 'd:' .. group .. ':' .. #message .. ':' .. of)
    redis.call('HINCRBY', meta, 'bytes', #message)
    redis.call('HINCRBY', meta, 'finished', 1)
    redis.call('HINCRBY', meta, 'sent_bytes', #message)
    redis.call('HINCRBY', meta, 'tokens', tokens)
  end
end
if word == 'double' then redis.call('HINCRBY', meta, 'doubles', 1) end
if mine and word ~= 'ok' then  -- by mistake, another unit's group may come with this entry
  local asked = redis.call('XRANGE', requests, entry, entry)
  local note = asked[1] and redis.call('HGET', units, asked[1][2][2]) or ''
  mine = string.sub(note, 1, #entry + 3) ~= 'q:' .. entry .. ':'
end
if mine then
  redis.call('XACK', requests, 'actors', entry)
  redis.call('XDEL', requests, entry)
end
return word

--- script beat holds now
-- name, facts, entries worked on -> policy, whether the run ended, leases that were lost
local name, facts = ARGV[1], ARGV[2]
redis.pcall('HSET', actors, name, now .. ' ' .. facts)  -- a full server still renews leases
local lost = {}
for i = 3, #ARGV do
  if holds(name, ARGV[i]) then
    redis.call('XCLAIM', requests, 'actors', name, 0, ARGV[i], 'JUSTID')
  else
    table.insert(lost, ARGV[i])
  end
end
return {redis.call('HGET', meta, 'policy') or '', redis.call('HGET', meta, 'ended') or '', lost}

--- script news
-- -> policy, whether the run ended. Like `take` and `read` of nothing new it writes nothing, so that
-- a server that keeps everything on disk answers at once, however often it is asked.
return {redis.call('HGET', meta, 'policy') or '', redis.call('HGET', meta, 'ended') or ''}

--- script leave
local name = ARGV[1]
redis.call('HDEL', actors, name)
if redis.call('EXISTS', requests) == 0 then return 0 end
local pending = redis.call('XPENDING', requests, 'actors', '-', '+', 10000, name)
for _, entry in ipairs(pending) do
  -- As if its lease had run out long ago: the next actor takes it at once.
  redis.call('XCLAIM', requests, 'actors', 'given-back', 0, entry[1], 'IDLE', 864000000, 'JUSTID')
end
redis.call('XGROUP', 'DELCONSUMER', requests, 'actors', name)
return #pending

--- script read guard
-- start, count -> [entry, number, message]
local found = redis.call('XREADGROUP', 'GROUP', 'trainer', 'trainer', 'COUNT', ARGV[5],
                         'STREAMS', groups, ARGV[4])
local entries = {}
if found then
  for _, entry in ipairs(found[1][2]) do
    if entry[2] then table.insert(entries, {entry[1], entry[2][2], entry[2][4]}) end
  end
end
return {'ok', entries}

--- script commit guard now
-- low, counters, numbers at or above `low` that are consumed too -> how many groups it freed
local low, counters = tonumber(ARGV[4]), ARGV[5]
local consumed = {}
for i = 6, #ARGV do consumed[ARGV[i]] = true end
local all = redis.call('HGETALL', units)
local freed, count = 0, 0
for i = 1, #all, 2 do
  local number, unit = all[i], all[i + 1]
  local below = tonumber(number) < low
  if below or consumed[number] then
    local kind, place, size = string.match(unit, '^(%a):?([^:]*):?([^:]*)')
    if kind == 'd' then
      redis.call('XACK', groups, 'trainer', place)
      redis.call('XDEL', groups, place)
      freed = freed + tonumber(size)
      count = count + 1
    elseif kind == 'q' then
      redis.call('XACK', requests, 'actors', place)
      redis.call('XDEL', requests, place)
    end
    if below then redis.call('HDEL', units, number) else redis.call('HSET', units, number, 'c') end
  end
end
redis.call('HINCRBY', meta, 'bytes', string.format('%d', -freed))
redis.call('HSET', meta, 'low', low, 'counters', counters, 'committed_at', now)
-- Actors that left without a word an hour ago are forgotten, so that nothing grows for ever.
local beats = redis.call('HGETALL', actors)
for i = 1, #beats, 2 do
  if now - tonumber(string.match(beats[i + 1], '^%d+')) > 3600000 then
    if #redis.call('XPENDING', requests, 'actors', '-', '+', 1, beats[i]) == 0 then
      redis.call('XGROUP', 'DELCONSUMER', requests, 'actors', beats[i])
      redis.call('HDEL', actors, beats[i])
    end
  end
end
return {'ok', count}

--- script discard guard
-- number, reason … -> frees the groups of units that were dropped, and remembers why
for i = 4, #ARGV, 2 do
  local kind, place, size, of = string.match(redis.call('HGET', units, ARGV[i]) or '',
                                             '^(%a):?([^:]*):?([^:]*):?([^:]*)')
  if kind == 'd' then
    redis.call('XACK', groups, 'trainer', place)
    redis.call('XDEL', groups, place)
    redis.call('HINCRBY', meta, 'bytes', '-' .. size)
    redis.call('HSET', units, ARGV[i], 'x:' .. ARGV[i + 1] .. ':' .. of)
  end
end
return {'ok'}

--- script announce guard now
-- policy as JSON, a serial that was before -> serial: a number that no other policy of the run has,
-- greater than those of all policies before it
-- By the clock, so that it grows even where the server has forgotten the serials before.
local before = math.max(tonumber(redis.call('HGET', meta, 'serial') or '0'), tonumber(ARGV[5]))
local serial = string.format('%.0f', math.max(now, before + 1))
redis.call('HSET', meta, 'serial', serial, 'policy', '[' .. serial .. ',' .. ARGV[4] .. ']')
redis.call('HDEL', meta, 'ended')
return {'ok', serial}

--- script end guard
-- why -> actors hear that no more work will come
redis.call('HSET', meta, 'ended', ARGV[4])
return {'ok'}

--- piece noted
local noted = {servers = servers, roles = roles}

--- script note noted now
-- servers | roles, name, facts as JSON (nothing: forgotten)
if ARGV[3] == '' then
  redis.call('HDEL', noted[ARGV[1]], ARGV[2])
  return {'ok'}
end
redis.call('HSET', noted[ARGV[1]], ARGV[2], now .. ' ' .. ARGV[3])
-- Servers that left without a word an hour ago are forgotten, so that nothing grows for ever.
local all = redis.call('HGETALL', servers)
for i = 1, #all, 2 do
  if now - tonumber(string.match(all[i + 1], '^%d+')) > 3600000 then
    redis.call('HDEL', servers, all[i])
  end
end
return {'ok'}

--- script notes noted now
-- servers | roles -> [name, its age in ms, facts]
local found = {}
local all = redis.call('HGETALL', noted[ARGV[1]])
for i = 1, #all, 2 do
  local at, facts = string.match(all[i + 1], '^(%d+) (.*)$')
  table.insert(found, {all[i], now - tonumber(at), facts})
end
return found
