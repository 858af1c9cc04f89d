-- transition: move a dataset to another state, on a person's or a gate's word.
-- KEYS: state
-- ARGV: target reason sources...
--   sources: the states from which this is allowed
-- ANSWERS: the state it was in; it moved only if that is one of sources
local state = redis.call('HGET', KEYS[1], 'state') or ''
for i = 3, #ARGV do
  if state == ARGV[i] then
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2])
    if ARGV[1] == 'open' and state ~= 'open' then
      -- Somebody has looked: the gates go by what is claimed from now on.
      local t = redis.call('TIME')
      redis.call('HSET', KEYS[1], 'gates_since_ms', t[1] * 1000 + math.floor(t[2] / 1000))
    end
    break
  end
end
return state
