-- register: make a dataset known, or take over its changed settings.
-- KEYS: datasets state
-- ARGV: name spec cap_tokens count weight
-- ANSWERS: "new", "known", or "reopened" (a capped dataset whose cap now leaves room, or a failed or halted one)
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
-- In the order of registration, also within one millisecond.
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
if last[2] then now = math.max(now, tonumber(last[2]) + 1) end
local settings = {'spec', ARGV[2], 'cap_tokens', ARGV[3], 'count', ARGV[4], 'weight', ARGV[5]}
if redis.call('ZADD', KEYS[1], 'NX', now, ARGV[1]) == 1 or redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('HSET', KEYS[2], 'state', 'open', 'room', 0, unpack(settings))
  return 'new'
end
local old = redis.call('HMGET', KEYS[2], 'state', 'cap_tokens', 'prompt_tokens', 'completion_tokens',
  'uncounted_prompt_tokens', 'uncounted_completion_tokens')
redis.call('HSET', KEYS[2], unpack(settings))
local spent = tonumber(old[4] or '0') - tonumber(old[6] or '0')
if ARGV[4] == 'total' then spent = spent + tonumber(old[3] or '0') - tonumber(old[5] or '0') end
local cap, before = tonumber(ARGV[3]), tonumber(old[2])
-- Cap 0 means no cap. A cap that was not raised leaves a capped dataset closed, however close it landed.
local raised = before > 0 and (cap == 0 or (cap > before and cap > spent))
if old[1] == 'failed' or old[1] == 'halted' or (old[1] == 'capped' and raised) then
  redis.call('HSET', KEYS[2], 'state', 'open', 'reason', '')
  -- What a gate saw before has been looked at by now.
  if old[1] ~= 'capped' then redis.call('HSET', KEYS[2], 'gates_since_ms', now) end
  return 'reopened'
end
return 'known'
