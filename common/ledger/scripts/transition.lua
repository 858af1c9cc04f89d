-- transition: move a dataset to another state, on a person's or a gate's word.
-- KEYS: state
-- ARGV: target reason sources...
--   sources: the states from which this is allowed
-- ANSWERS: the state it was in; it moved only if that is one of sources
local state = redis.call('HGET', KEYS[1], 'state') or ''
for i = 3, #ARGV do
  if state == ARGV[i] then
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2])
    break
  end
end
return state
