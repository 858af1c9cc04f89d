-- reject: end samples that get no record, each once; their lines in rejects.jsonl are durable by now.
-- KEYS: state done attempts queued leases owners payloads tries rejects suspects prompts lost conversations stopped
-- ARGV: rebuild samples...
--   rebuild: 1 when the ledger is built anew from the files: the attempt need not be the current one
--   samples: (index attempt reason left) each; left: the turns of its conversation that end with it, 0 if it is none's
-- ANSWERS: one entry a sample: 1 it was rejected by this call, 0 it is done already or another attempt has it
-- The attempt is used up by its reject: a worker that was frozen and settles it later is told that it was superseded.
local answers = {}
for at = 2, #ARGV, 4 do
  local index, attempt = ARGV[at], tonumber(ARGV[at + 1])
  local last = redis.call('GETRANGE', KEYS[3], index * 6, index * 6 + 5)
  local current = #last == 6 and struct.unpack('>I6', last) or 0
  if (ARGV[1] == '1' or current == attempt) and redis.call('SETBIT', KEYS[2], index, 1) == 0 then
    redis.call('SETRANGE', KEYS[3], index * 6, struct.pack('>I6', math.max(current, attempt) + 1))
    redis.call('HINCRBY', KEYS[1], 'rejected', 1)
    redis.call('HINCRBY', KEYS[9], ARGV[at + 2], 1)
    redis.call('ZREM', KEYS[4], index)
    redis.call('ZREM', KEYS[5], index)
    redis.call('HDEL', KEYS[6], index)
    redis.call('HDEL', KEYS[7], index)
    redis.call('HDEL', KEYS[8], index)
    redis.call('HDEL', KEYS[10], KEYS[5] .. ' ' .. index)
    redis.call('HDEL', KEYS[11], index)
    redis.call('HDEL', KEYS[12], index)
    redis.call('HDEL', KEYS[13], index)
    if ARGV[at + 3] ~= '0' then redis.call('HINCRBY', KEYS[14], 'rejected', ARGV[at + 3]) end
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
return answers
